"""The package's exceptions and the one form of every message about an argument.

Bad arguments raise ValueError or TypeError; the two classes below tell "not built" and "wrong machine" apart from them.
"""


class NotSupportedError(NotImplementedError):
    """A legal call for which there is no kernel. The message names the nearest call that works."""


class DeviceError(RuntimeError):
    """The device cannot run the kernels. The message names the compute capability found and the one needed."""


class Message(str):
    """The text of an error about an argument; `cute-fa` shows it alone, while other errors keep their traceback."""


def expected(argument: str, rule: str, got: object, advice: str) -> Message:
    """The message `<argument>: expected <rule>, got <value>. <what to do>.`"""
    return Message(f"{argument}: expected {rule}, got {got}. {advice}.")
