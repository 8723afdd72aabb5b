# SPDX-License-Identifier: Apache-2.0
"""The ways in which bytes come from trainer ranks to engine ranks."""
