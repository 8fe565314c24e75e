"""The evaluation protocol (paper, section 4), for covariances from anywhere."""
