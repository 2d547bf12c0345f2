"""What is asked of a candidate besides which cause: does every hook show, and take, what its name says?"""
