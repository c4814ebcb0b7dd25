"""Where the processes run: the Ray Serve application and what `hotbranch up` starts."""
