"""Learned rewards and the models behind them."""
