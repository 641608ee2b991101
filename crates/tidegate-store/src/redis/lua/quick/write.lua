  if offset$ then
    -- First, since a server that doesn't allow it is to have changed nothing.
    if expires$ then call('PEXPIRE', KEYS[behind + $], expires$) end
    -- A number is printed for a call as if it had a fraction, which takes longer.
    call('SETRANGE', KEYS[behind + $], string.format('%d', offset$), value$)
  elseif expires$ then
    call('SET', KEYS[behind + $], value$, 'PX', expires$)
  else
    call('SET', KEYS[behind + $], value$, 'KEEPTTL')
  end
