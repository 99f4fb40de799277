"""Read a drafter with speculators and write it again: python speculators_copy.py FOLDER COPY TARGET"""

import sys

from speculators import SpeculatorModel, SpeculatorModelConfig

if __name__ == "__main__":
    folder, copy, target = sys.argv[1:]
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = target  # embeddings and head are read from there
    SpeculatorModel.from_pretrained(folder, config=config).save_pretrained(copy)
