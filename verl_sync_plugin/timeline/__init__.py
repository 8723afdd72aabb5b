# SPDX-License-Identifier: Apache-2.0
"""A page and a trace of what the syncs of a run cost, made of its report file. Needs neither torch nor verl."""
