"""Text environments: adapters of real packages. Importing this loads none of them."""
