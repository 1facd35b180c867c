"""Errors that a model, a plan or a rank can raise.

PlaitError
├── ConfigError         a config.json that cannot be served: says which key and what is known
│   └── ShardError      a tensor-parallel size that cannot work: lists the sizes that do
├── PlanError           a cache layout or plan that does not fit or does not agree
│   └── PlanMismatch    a rank built something else than the plan says, field by field
├── WeightsError        a checkpoint file that is missing, truncated or of another shape
└── RankError           a rank failed or stopped answering
"""


class PlaitError(Exception):
    """Base of everything that a person can cause and mend."""


class ConfigError(PlaitError):
    """A model config that cannot be served as it stands."""


class ShardError(ConfigError):
    """A tensor-parallel size that this model cannot be split into."""


class PlanError(PlaitError):
    """A cache plan that cannot work with the memory or limits given."""


class PlanMismatch(PlanError):
    """What a rank really built differs from the plan it was sent."""


class WeightsError(PlaitError):
    """A checkpoint that lacks a tensor, or holds one of another shape."""


class RankError(PlaitError):
    """A rank process failed, or did not answer in time."""
