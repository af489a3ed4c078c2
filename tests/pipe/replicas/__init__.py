"""Stages that are served by several devices."""
