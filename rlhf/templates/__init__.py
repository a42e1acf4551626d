"""Templates of `rlhf new`: one folder's worth of files for each part, as `<part>.<file>.txt`.

`$name` is the name that was given, `$Class` the same as the name of a class. A `$$` is a dollar sign.
"""
