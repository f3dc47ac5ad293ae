"""The paper's tables beside what the simulator serves under the same conditions, as far as the paper tells them."""
