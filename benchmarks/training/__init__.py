# SPDX-License-Identifier: Apache-2.0
"""Whether a training under the plugin learns what it learns under stock verl."""
