"""Data for language models: tokenise, inspect, deduplicate, filter and mix, as functions and commands.

Functions take the paths of files or folders, stream them in bounded memory, and write a folder
atomically; after a kill the same call resumes.

    rows      documents with their source lines
    output    the output folder: parts, progress, resume
    report    report.json and report.htm
"""
