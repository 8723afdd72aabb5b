# SPDX-License-Identifier: Apache-2.0
"""The phase of a real training run, stock verl against the plugin."""
