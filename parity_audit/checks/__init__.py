"""What is asked besides which cause: is the question sound, does the reference agree with itself, what could have been seen,
do hooks show and take what their names say?"""
