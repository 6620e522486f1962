"""Where the time of a pass goes, stage by stage and layer by layer, and how near each stage is to what the machine
can do. `lab.profile` is the door.
"""

from colibri_lab.profiling.limits import Limits
from colibri_lab.profiling.result import Profile
from colibri_lab.profiling.run import profile

__all__ = ["Limits", "Profile", "profile"]
