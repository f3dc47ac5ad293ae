"""The paper's tables beside what the simulator serves under the same conditions, as far as the paper tells them."""

from evolving_sim.paper.making import PaperResult, make_paper

__all__ = ["PaperResult", "make_paper"]
