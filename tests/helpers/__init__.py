"""Tools that several files of tests share; nothing here is a test."""
