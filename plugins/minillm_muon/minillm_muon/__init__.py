"""The Muon optimizer, as a plugin of minillm."""
