"""A module's call: on plain local rows where the model treats rows one by one, on Rows where it does not."""
