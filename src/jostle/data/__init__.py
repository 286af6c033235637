"""What the model is trained and asked on: data sets and texts as users have them."""
