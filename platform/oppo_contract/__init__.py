"""What the platform, the workers and the engine agree on: the run's configuration, states, events and wire format.

Imports pydantic only (and ruamel.yaml inside `yaml_text`, see docs/decisions/0001). Never torch, never Django.
"""

from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.spec_errors import SpecError, SpecProblem

__all__ = ["RunSpec", "SpecError", "SpecProblem", "load_spec"]
