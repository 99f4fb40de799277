"""Read a drafter with speculators and write it again: python speculators_copy.py FOLDER COPY TARGET"""

import sys

from speculators import SpeculatorModel

if __name__ == "__main__":
    folder, copy, target = sys.argv[1:]
    SpeculatorModel.from_pretrained(folder, verifier=target).save_pretrained(copy)
