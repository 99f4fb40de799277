"""`draftsmith serve-bench`: servers under load, with speculation and without, beside what an evaluation predicted."""
