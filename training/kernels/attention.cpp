#include <stdint.h>
#include <string.h>
#include <math.h>
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8v __attribute__((vector_size(32), aligned(4), may_alias));
#define INL static inline __attribute__((always_inline))
INL v8 splat(float x){return (v8){x,x,x,x,x,x,x,x};}
INL v8 expv(v8 x){ /* e^x, x <= 0; relative error about 1e-7 */
  v8 lo=splat(-87.0f); x=(x>lo)?x:lo;
  v8 t=x*splat(1.44269504f)+splat(12582912.0f);
  i8v n=(i8v)t; v8 f=t-splat(12582912.0f);
  v8 r=x-f*splat(0.693359375f); r=r+f*splat(2.12194440e-4f);
  v8 p=splat(1.9875691500e-4f);
  p=p*r+splat(1.3981999507e-3f);p=p*r+splat(8.3334519073e-3f);p=p*r+splat(4.1665795894e-2f);
  p=p*r+splat(1.6666665459e-1f);p=p*r+splat(5.0000001201e-1f);
  p=p*r*r+r+splat(1.0f);
  return p*(v8)((n<<23)+(i8v)splat(1.0f));
}
INL float hsum(v8 a){float s=0;for(int i=0;i<8;i++)s+=a[i];return s;}
INL float hmax(v8 a){float s=a[0];for(int i=1;i<8;i++)s=a[i]>s?a[i]:s;return s;}
/* out[t][0..Sp) = sum_d a[t*as+d] * bt[d*Sp + ...] */
INL void product_t(const int D,int T,int Sp,const float*a,long as,const float*bt,float*out){
  for(int i=0;i<T;i+=4){
    const float*r0=a+i*as,*r1=a+(i+1<T?i+1:i)*as,*r2=a+(i+2<T?i+2:i)*as,*r3=a+(i+3<T?i+3:i)*as;
    for(int j=0;j<Sp;j+=16){
      v8 c00={0},c01={0},c10={0},c11={0},c20={0},c21={0},c30={0},c31={0};
      for(int d=0;d<D;d++){
        v8 b0=*(v8*)(bt+d*Sp+j),b1=*(v8*)(bt+d*Sp+j+8);
        v8 x=splat(r0[d]);c00+=x*b0;c01+=x*b1;
        x=splat(r1[d]);c10+=x*b0;c11+=x*b1;
        x=splat(r2[d]);c20+=x*b0;c21+=x*b1;
        x=splat(r3[d]);c30+=x*b0;c31+=x*b1;
      }
      float*o=out+(long)i*Sp+j;
      *(v8*)o=c00;*(v8*)(o+8)=c01;*(v8*)(o+Sp)=c10;*(v8*)(o+Sp+8)=c11;
      *(v8*)(o+2*Sp)=c20;*(v8*)(o+2*Sp+8)=c21;*(v8*)(o+3*Sp)=c30;*(v8*)(o+3*Sp+8)=c31;
    }
  }
}
/* out[r*os + 0..D) = sum_c a[r*ar + c*ac] * b[c*bs + ...] */
INL void product(const int D,int R,int C,const float*a,long ar,long ac,const float*b,long bs,float*out,long os){
  for(int r=0;r<R;r+=2){
    int two=r+1<R; const float*a0=a+r*ar,*a1=two?a0+ar:a0;
    for(int d0=0;d0<D;d0+=32){
      const int W=D<32?D/8:4;
      v8 x0[4]={{0},{0},{0},{0}},x1[4]={{0},{0},{0},{0}};
      for(int c=0;c<C;c++){
        v8 p=splat(a0[c*ac]),q=splat(a1[c*ac]);
        for(int w=0;w<W;w++){v8 y=*(v8*)(b+c*bs+d0+8*w);x0[w]+=p*y;x1[w]+=q*y;}
      }
      for(int w=0;w<W;w++){*(v8*)(out+r*os+d0+8*w)=x0[w];if(two)*(v8*)(out+(r+1)*os+d0+8*w)=x1[w];}
    }
  }
}
INL void transpose(const int D,int S,int Sp,const float*a,long as,float*t){
  int j=0;
  for(;j<S;j++)for(int d=0;d<D;d++)t[d*Sp+j]=a[j*as+d];
  for(;j<Sp;j++)for(int d=0;d<D;d++)t[d*Sp+j]=0;
}
typedef struct {long b,h,t;} stride;
INL void mask_row(float*row,const uint8_t*m,long ms,int S,int Sp,float scale,int limit){
  for(int j=0;j<Sp;j+=8)*(v8*)(row+j)*=splat(scale);
  if(m)for(int j=0;j<S;j++)if(!m[j*ms])row[j]=-INFINITY;
  for(int j=limit;j<Sp;j++)row[j]=-INFINITY;
}
INL void fwd(const int D,int B,int H,int T,int S,const float*q,stride qs,const float*k,stride ks,const float*v,stride vs,
  const uint8_t*m,stride ms,long mss,int causal,float scale,float*o,float*lse,float*room){
  int Sp=(S+15)/16*16,Tp=(T+3)/4*4; float*kt=room,*P=kt+(long)D*Sp;
  for(int b=0;b<B;b++)for(int h=0;h<H;h++){
    transpose(D,S,Sp,k+b*ks.b+h*ks.h,ks.t,kt);
    product_t(D,T,Sp,q+b*qs.b+h*qs.h,qs.t,kt,P);
    for(int i=0;i<T;i++){
      float*row=P+(long)i*Sp;
      mask_row(row,m?m+b*ms.b+h*ms.h+i*ms.t:0,mss,S,Sp,scale,causal&&i+1<S?i+1:S);
      v8 x=*(v8*)row;for(int j=8;j<Sp;j+=8){v8 y=*(v8*)(row+j);x=x>y?x:y;}
      float top=hmax(x); if(top==-INFINITY)top=0;
      v8 s={0};for(int j=0;j<Sp;j+=8){v8 raw=*(v8*)(row+j);v8 e=expv(raw-splat(top));e=(raw==splat(-INFINITY))?splat(0):e;*(v8*)(row+j)=e;s+=e;}
      float z=hsum(s); v8 inv=splat(z>0?1/z:0);
      for(int j=0;j<Sp;j+=8)*(v8*)(row+j)*=inv;
      lse[((long)b*H+h)*T+i]=z>0?top+logf(z):INFINITY;
    }
    product(D,T,S,P,Sp,1,v+b*vs.b+h*vs.h,vs.t,o+((long)b*T*H+h)*D,(long)H*D);
  }
}
INL void bwd(const int D,int B,int H,int T,int S,const float*q,stride qs,const float*k,stride ks,const float*v,stride vs,
  const uint8_t*m,stride ms,long mss,int causal,float scale,const float*g,stride gs,const float*lse,float*dq,float*dk,float*dv,float*room){
  int Sp=(S+15)/16*16,Tp=(T+3)/4*4; float*kt=room,*P=kt+(long)D*Sp,*dP=P+(long)Tp*Sp;
  for(int b=0;b<B;b++)for(int h=0;h<H;h++){
    const float*qh=q+b*qs.b+h*qs.h,*kh=k+b*ks.b+h*ks.h,*vh=v+b*vs.b+h*vs.h,*gh=g+b*gs.b+h*gs.h;
    transpose(D,S,Sp,kh,ks.t,kt); product_t(D,T,Sp,qh,qs.t,kt,P);
    transpose(D,S,Sp,vh,vs.t,kt); product_t(D,T,Sp,gh,gs.t,kt,dP);
    for(int i=0;i<T;i++){
      float*row=P+(long)i*Sp,*dr=dP+(long)i*Sp;
      mask_row(row,m?m+b*ms.b+h*ms.h+i*ms.t:0,mss,S,Sp,scale,causal&&i+1<S?i+1:S);
      v8 l=splat(lse[((long)b*H+h)*T+i]),s={0};
      for(int j=0;j<Sp;j+=8){v8 raw=*(v8*)(row+j);v8 e=expv(raw-l);e=(raw==splat(-INFINITY))?splat(0):e;*(v8*)(row+j)=e;s+=e**(v8*)(dr+j);}
      v8 delta=splat(hsum(s)),c=splat(scale);
      for(int j=0;j<Sp;j+=8)*(v8*)(dr+j)=*(v8*)(row+j)*(*(v8*)(dr+j)-delta)*c;
    }
    long base=((long)b*H+h)*D,bt=(long)b*T*H*D+(long)h*D,bs=(long)b*S*H*D+(long)h*D;(void)base;
    product(D,S,T,P,1,Sp,gh,gs.t,dv+bs,(long)H*D);
    product(D,S,T,dP,1,Sp,qh,qs.t,dk+bs,(long)H*D);
    product(D,T,S,dP,Sp,1,kh,ks.t,dq+bt,(long)H*D);
  }
}
#define EACH(call) switch(D){case 16:{enum{d=16};call;}break;case 32:{enum{d=32};call;}break;case 64:{enum{d=64};call;}break;}
extern "C" int attention_forward(int D,int B,int H,int T,int S,const float*q,const long*qs,const float*k,const long*ks,const float*v,const long*vs,
  const uint8_t*m,const long*ms,int causal,float scale,float*o,float*lse,float*room){
  stride zero={0};
  EACH(fwd(d,B,H,T,S,q,*(stride*)qs,k,*(stride*)ks,v,*(stride*)vs,m,m?*(stride*)ms:zero,m?ms[3]:0,causal,scale,o,lse,room))
 return 0;}
extern "C" int attention_backward(int D,int B,int H,int T,int S,const float*q,const long*qs,const float*k,const long*ks,const float*v,const long*vs,
  const uint8_t*m,const long*ms,int causal,float scale,const float*g,const long*gs,const float*lse,float*dq,float*dk,float*dv,float*room){
  stride zero={0};
  EACH(bwd(d,B,H,T,S,q,*(stride*)qs,k,*(stride*)ks,v,*(stride*)vs,m,m?*(stride*)ms:zero,m?ms[3]:0,causal,scale,g,*(stride*)gs,lse,dq,dk,dv,room))
 return 0;}

extern "C" long attention_room(int D,int T,int S){long Sp=(S+15)/16*16,Tp=(T+3)/4*4;return D*Sp+2*Tp*Sp;}
