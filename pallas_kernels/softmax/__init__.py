"""Operations over the rows of a matrix: softmax, its statistics and derivatives, cross entropy."""
