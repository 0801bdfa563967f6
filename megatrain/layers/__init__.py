"""Blocks as functions of explicit weights: inputs, embedding, decoder layers, head. Imports torch and transformers."""
