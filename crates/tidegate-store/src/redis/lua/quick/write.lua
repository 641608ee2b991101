  if offset$ then
    call('SETRANGE', KEYS[$], offset$, value$)
    if expires$ then call('PEXPIRE', KEYS[$], expires$) end
  elseif expires$ then
    call('SET', KEYS[$], value$, 'PX', expires$)
  else
    call('SET', KEYS[$], value$, 'KEEPTTL')
  end
