"""Messages of other libraries that no user of this project can act on, dropped before they are printed.

transformers imports torchao wherever it is installed, for whatever command. torchao then warns of each compiled extension that does not fit
the machine, and torch of how torchao registers its types.
"""

import logging

MESSAGES = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}


def _drop(record: logging.LogRecord) -> bool:
    return MESSAGES[record.name] not in record.getMessage()


# Every package imports this module first, since whichever package is imported first may import transformers.
for name in MESSAGES:
    logging.getLogger(name).addFilter(_drop)
