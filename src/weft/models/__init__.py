"""What a model is: read once from its modules into frozen values, for `pack`, `parallelize`, `generate` and stages.

spec       the values: layers, attention, norms, heads; walks over them
fit        whether the tensors of such values fit each other
family     `Family`, what one file of `families/` says; functions that read modules strictly
options    the options of a config: what becomes of each
families/  one file for each family, and the list of them
modules    is the model still made as it was when it was read?
twin       how a model gets another `forward`
"""
