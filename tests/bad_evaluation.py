from bad_inputs import BadInput, nothing

CASES = [BadInput("recipe: missing", nothing, "train medusa nowhere.yaml", "recipe .nowhere.yaml. not found")]
