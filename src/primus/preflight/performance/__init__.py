"""Judgement of measurements: devices, communication between ranks, endurance, storage."""
