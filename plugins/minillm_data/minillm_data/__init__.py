"""Data for language models: tokenise, inspect, deduplicate, filter and mix, as functions and commands.

Every function takes the paths of files or folders, streams them in bounded memory, and writes a
folder that is there whole or not at all; after a kill the same call continues where it stopped.

    rows      documents with the lines that they stand on
    output    the folder that is written: parts, progress, resumption
    report    report.json and report.htm
"""
