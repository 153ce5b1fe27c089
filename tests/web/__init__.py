"""Tests of the page, in a real Chromium and over HTTP."""
