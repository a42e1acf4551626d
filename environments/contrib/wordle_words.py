"""Five-letter words for `environments.contrib.wordle`, written down for it; commoner ones first."""

_TEXT = """
house water world place right great small every found still plant point think again study light night might
story paper group often began white black green brown horse stone table chair river ocean beach bread fruit
apple lemon grape peach melon berry onion sugar honey cream knife spoon plate glass clock watch phone radio
music piano drums voice sound laugh smile dream sleep heart brain blood mouth tooth thumb elbow ankle wrist
chest woman child uncle nurse judge actor pilot guard chief queen baker tiger zebra camel sheep goose eagle
snake whale shark mouse puppy bunny moose otter skunk robin raven crane finch movie novel title verse crown
sword spear arrow armor metal steel brass wheel brake motor truck train plane cycle ferry canoe yacht cabin
tower brick fence porch floor shelf couch stool quilt linen cloth dress shirt skirt pants scarf glove boots
socks jeans towel brush broom mower razor money coins price value trade store shops visit north south angle
cover cross force front grass grain wheat flour pasta pizza toast salad sauce spice curry steak bacon olive
mango cocoa candy cider juice drink hotel guest party dance waltz tango sport rugby chess cards score medal
prize skate climb march crawl throw catch swing reach touch press shake shout speak write print spell count
teach learn solve prove guess doubt trust faith honor pride greed anger peace grief shame mercy grace charm
youth adult giant dwarf ghost witch fairy demon angel devil magic curse storm cloud rainy windy sunny foggy
frost flood earth globe orbit comet space venus pluto lunar solar flame spark smoke ashes ridge cliff slope
field marsh swamp creek brook shore coast delta woods trunk roots petal tulip daisy lilac poppy cedar maple
aspen birch thorn fresh clean dirty messy rough sharp blunt heavy quick brisk early later today month years
hours daily minor major equal exact wrong false valid legal crime theft fraud court trial juror proof alibi
sheet pages index chart graph ratio digit prime squad troop fleet siege rebel enemy rival union state mayor
royal noble baron human being alive birth death grave funny silly witty happy merry jolly proud angry upset
moody tired awake alert brave timid loyal cruel nasty sweet salty spicy tangy crisp juicy moist soggy plain
fancy cheap empty quiet noisy tight loose broad thick dense solid fluid vapor ozone laser radar robot drone
cable modem pixel board click login email reply query input logic virus patch debug cache stack queue array
class under above below after until while where there their these those which would could other about first
third seven eight forty fifty sixty dozen scale meter liter pound ounce grams width depth range level slant
curve round cubic shape color amber coral ivory khaki beige mauve azure blaze bloom blush boast bonus brief
bring build burst carry cause chase cheer chill claim clasp cling cloak coach crack craft crash craze creep
crowd crush crust delay dodge draft drain drape drawn drift drill drive eager elect elite enjoy enter erase
error essay event exist extra fable faint feast fetch fever fiber fight flash flock float flute focus forge
frame frank frown glaze gleam glide gloom glory grasp gravy greet grind groan groom grove growl habit handy
haste hatch haunt hedge hinge hobby hound hurry ideal imply inner irony jelly jewel joint joker kayak knack
kneel knock label large latch layer lease leash ledge lever limit lobby local lodge lucky lunch maker manor
match meant mimic mixer model moral mound mount nerve niece ninth occur offer onset opera order organ paint
panel panic pause pearl phase pinch pivot pouch power quest quote raise ranch rapid reign relax rider rinse
risky roast rusty saint sauna scare scene scent scoop scout seize sense serve shade shaft share shell shift
shine short siren skill slice slide smart snack spade spike spine split spoke spray stage stain stair stake
stale stamp stare start steam steep stern stick sting stove strap straw strip surge swarm swear sweep swift
taste thief thigh torch total trace track trail treat trend tribe trick truth tutor twist ultra usher vague
vault vivid wagon waist waste weave wedge weigh whirl whisk widow wield woven yeast yield young zesty
"""

WORDS = tuple(_TEXT.split())
