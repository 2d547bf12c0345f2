"""Bad inputs and injected faults, each with the outcome that it has to have, and what came of them."""
