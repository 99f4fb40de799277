from draftsmith.inference import library_warnings  # noqa: F401  before any module of this package imports transformers
