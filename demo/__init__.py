"""The main job, end to end: plan a language model for eight host devices, train it on real text, check everything."""
