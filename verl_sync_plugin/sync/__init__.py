# SPDX-License-Identifier: Apache-2.0
"""The phase between any trainer and any rollout: one sync from plan to report."""
