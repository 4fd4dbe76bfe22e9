"""Reports of a running training: progress lines, a line of JSON for each epoch, a timeline, process usage."""
