"""The environment of tool.yaml: a calculator that the model may call."""


class Calculator:
    """Adds two numbers; the reward is for calling it with the right ones, and for the right answer of the tool."""

    def reset(self, a: int, b: int, **columns):
        self.numbers, self.called, self.right = {a, b}, False, False

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.called = True
        self.right = self.right or {a, b} == self.numbers
        return a + b

    def get_reward(self) -> float:
        return 0.3 * self.called + 0.7 * self.right
