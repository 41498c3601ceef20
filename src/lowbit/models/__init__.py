"""Whole models: which leaves are quantized and how, reports, training, shardings of trees."""
