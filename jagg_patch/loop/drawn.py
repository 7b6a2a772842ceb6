"""Orders of a rollout's samples, drawn before the trainer draws them."""

import hashlib

import torch


class Drawn:
    """`orders` of the rollout's samples so far, each `[T]`."""

    def __init__(self):
        self.forget()

    def forget(self):
        self._generator, self.orders = None, []

    def draw(self, n_steps, device):
        """One more, as the trainer will draw it, if the rollout draws nothing from the CPU's generator.

        On a CPU it does (`device`: "cpu"): there it is another one, that shares no bits with the noise.
        """
        if self._generator is None:
            self._generator, state = torch.Generator(), torch.get_rng_state()
            if device == "cpu":
                self._generator.manual_seed(int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:7], "big"))
            else:
                self._generator.set_state(state)
        self.orders.append(torch.randperm(n_steps, generator=self._generator))
        return self.orders[-1]
