"""MoveNet MultiPose as published for TensorFlow.js; neither TensorFlow nor a pose framework is needed."""
