  if expires$ then
    call('SET', KEYS[$], value$, 'PX', expires$)
  else
    call('SET', KEYS[$], value$, 'KEEPTTL')
  end
