"""The model, the data and the defaults of the demo."""
