"""`draftsmith plan`: memory and time of a run before anything is loaded."""
