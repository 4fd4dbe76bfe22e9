"""The results of a search on disk: trials as JSON, the file for Optuna's dashboard, queued trials."""
