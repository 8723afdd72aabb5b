# SPDX-License-Identifier: Apache-2.0
"""Runs the real verl + Ray + SGLang stack on a machine without an accelerator; active only with VERL_PLATFORM=cpu."""
