# SPDX-License-Identifier: Apache-2.0
"""Inkling (Thinking Machines): text backbone, draft head, renderer and parsers.

One model definition in `common/`; a vendor folder holds only what differs.
`configs` is torch-free and may be imported by the front end; nothing else may.
"""
