"""Files of other pose tools: keypoints with scores read into one table, and written back with covariances."""
