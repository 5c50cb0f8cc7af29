"""Records a training job from inside its process."""
