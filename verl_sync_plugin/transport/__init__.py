# SPDX-License-Identifier: Apache-2.0
"""How bytes and messages get from one trainer rank to the engine rank on the same device."""
