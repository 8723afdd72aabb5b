# SPDX-License-Identifier: Apache-2.0
"""Room for the engine on the device, and readings of what is used."""
